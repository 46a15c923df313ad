"""A front that speaks the protocol of RocketMQ 5, for its official clients in every language."""

from outbox.errors import MissingExtraError

try:
    from outbox.rocketmq.front.clients import ClientPolicy
    from outbox.rocketmq.front.front import Front
    from outbox.rocketmq.front.security import Security
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] not in ("grpc", "google"):
        raise
    raise MissingExtraError("the front needs an extra: pip install 'outbox-log[rocketmq]'") from error

__all__ = ["ClientPolicy", "Front", "Security"]
