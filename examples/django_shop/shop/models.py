"""The tables of the shop."""

from django.db import models


class Order(models.Model):
    """An order."""

    customer = models.TextField()
    total = models.IntegerField()
