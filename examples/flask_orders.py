"""Orders over HTTP with Flask-SQLAlchemy: the message joins the transaction of `db.session`.

    export OUTBOX_DATABASE=sqlite:///$PWD/flask.db
    outbox db upgrade
    outbox relay --to stdout: &
    flask --app flask_orders run

The path is absolute because Flask-SQLAlchemy reads a relative one from the application's instance folder.
"""

import os
from typing import Any

from flask import Blueprint, Flask, abort, current_app, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from werkzeug.local import LocalProxy

from outbox import Outbox


class Base(DeclarativeBase):
    """The tables of the shop."""


db = SQLAlchemy(model_class=Base)
# Like `db`, whatever application is the current one: each has an Outbox of its own.
outbox: Outbox = LocalProxy(lambda: current_app.extensions["outbox"])  # type: ignore[assignment]
shop = Blueprint("shop", __name__)


class Order(db.Model):  # type: ignore[name-defined, misc]  # made by Flask-SQLAlchemy at run time
    """An order."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    total: Mapped[int]


@shop.post("/orders")
def place_order() -> tuple[dict[str, int], int]:
    """Take a new order, and tell everybody."""
    new = request.get_json()
    order = Order(customer=new["customer"], total=new["total"])
    db.session.add(order)
    db.session.flush()  # the order gets its id
    outbox.send(db.session, "orders", {"id": order.id, "total": order.total}, key=f"order-{order.id}")
    if order.total > 1000:
        abort(409, "that is more than there is")  # no commit: neither the order nor its message stays
    db.session.commit()
    return {"id": order.id}, 201


def create_app(config: dict[str, Any] | None = None) -> Flask:
    """The application, on the database of the environment, or on what the configuration says."""
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ.get("OUTBOX_DATABASE")
    app.config.update(config or {})
    db.init_app(app)
    with app.app_context():
        db.create_all()
        app.extensions["outbox"] = Outbox(db.engine)
    app.register_blueprint(shop)
    return app
