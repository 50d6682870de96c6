"""A look at the state after the first steps behind a save or a resume."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("recovery", "0004_sample_ledger"),
    ]

    operations = [
        migrations.AddField(
            model_name="steprow",
            name="probe",
            field=models.JSONField(null=True),
        ),
    ]
