"""The pages of the shop."""

import json

from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

import outbox.django
from shop.models import Order


@csrf_exempt
@require_POST
def place_order(request: HttpRequest) -> HttpResponse:
    """Take a new order, and tell everybody."""
    new = json.loads(request.body)
    with transaction.atomic():
        order = Order.objects.create(customer=new["customer"], total=new["total"])
        outbox.django.send("orders", {"id": order.pk, "total": order.total}, key=f"order-{order.pk}")
        if order.total > 1000:
            # The order and the message are rolled back together.
            transaction.set_rollback(True)
            return JsonResponse({"error": "too much for one order"}, status=409)
    return JsonResponse({"id": order.pk}, status=201)


urlpatterns = [path("orders", place_order)]
