"""What nodes hold in memory."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("recovery", "0005_state_probes"),
    ]

    operations = [
        migrations.CreateModel(
            name="SnapshotRow",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("generation_number", models.IntegerField()),
                ("step", models.IntegerField()),
                ("world_size", models.IntegerField()),
                ("rank", models.IntegerField()),
                ("boot_id", models.CharField(max_length=100)),
                ("kept_at", models.FloatField()),
                (
                    "job",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="snapshots", to="recovery.job"
                    ),
                ),
                (
                    "node",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="snapshots", to="recovery.node"
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("job", "node", "generation_number", "step", "rank"), name="one_row_per_part_in_memory"
                    )
                ],
            },
        ),
    ]
