"""What each step says of its samples and of where its time went."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("recovery", "0003_trust_ledger"),
    ]

    operations = [
        migrations.AddField(model_name="steprow", name="epoch_size", field=models.BigIntegerField(null=True)),
        migrations.AddField(
            model_name="steprow",
            name="indices_digest",
            field=models.CharField(blank=True, default="", max_length=16),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name="steprow",
            name="order_digest",
            field=models.CharField(blank=True, default="", max_length=16),
            preserve_default=False,
        ),
        migrations.AddField(model_name="steprow", name="samples", field=models.BigIntegerField(null=True)),
        migrations.AddField(model_name="steprow", name="tokens", field=models.BigIntegerField(null=True)),
        migrations.AddField(model_name="steprow", name="parameter_norm", field=models.FloatField(null=True)),
        migrations.AddField(model_name="steprow", name="data_s", field=models.FloatField(null=True)),
        migrations.AddField(model_name="steprow", name="forward_backward_s", field=models.FloatField(null=True)),
        migrations.AddField(model_name="steprow", name="optimizer_s", field=models.FloatField(null=True)),
        migrations.AddField(model_name="steprow", name="wait_s", field=models.FloatField(null=True)),
        migrations.AddField(model_name="steprow", name="checkpoint_s", field=models.FloatField(null=True)),
        migrations.AddField(model_name="steprow", name="memory_bytes", field=models.BigIntegerField(null=True)),
        migrations.AddField(model_name="steprow", name="gpu_memory_bytes", field=models.BigIntegerField(null=True)),
    ]
