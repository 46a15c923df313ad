"""The first tables."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Creates the table of orders."""

    initial = True
    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("customer", models.TextField()),
                ("total", models.IntegerField()),
            ],
        )
    ]
