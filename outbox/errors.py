"""Every error of the library, in one tree; each says what happened and what to do.

OutboxError
├── InvalidMessageError      a message that no destination could carry; refused before any SQL
├── NoTransactionError       `send` outside a transaction
├── TransactionAbortedError  a commit that PostgreSQL would turn into a silent rollback
├── DatabaseError            the database cannot be used (in memory, a restored copy)
│   └── StandbyError         the server is a standby
├── SchemaError              the tables are missing or of another version
├── SubscriptionError        a subscription is unknown, or declares something else
├── FilterError              a filter or a tag expression cannot be read; the error shows the place
├── LeaseLostError           another worker owns the partition now
├── PositionError            a position belongs to another server, or to an earlier time of this server
├── PurgedError              retention has removed messages that a reader had not read yet
├── OptionError              an option of the Spark source is unknown or outside its limits
├── ArchiveError             a folder of extracted messages cannot be read or continued
├── MissingExtraError        an optional dependency is not installed
├── SenderError              a destination cannot be opened
├── SignatureError           a webhook was not signed with the secret, or not lately
├── HungHandlerError         too many calls of a handler never came back
├── MQClientError            a call that RocketMQ would refuse, in its words
└── VerdictStandsError       a transaction has the opposite verdict already
"""


class OutboxError(Exception):
    """Base of all errors of this library."""


class InvalidMessageError(OutboxError, ValueError):
    """A message outside the limits. `field` names the part, `limit` the rule, `fix` what to do."""

    def __init__(self, field: str, limit: str, fix: str) -> None:
        super().__init__(f"{field}: {limit}; {fix}")
        self.field = field
        self.limit = limit
        self.fix = fix


class NoTransactionError(OutboxError):
    """There is no transaction for the message to be part of."""


class TransactionAbortedError(OutboxError):
    """The transaction failed earlier, so PostgreSQL would answer COMMIT with ROLLBACK."""


class DatabaseError(OutboxError):
    """The database cannot be used as it is."""


class StandbyError(DatabaseError):
    """The server is a standby, where no position can be captured. During a failover this is temporary."""


class SchemaError(OutboxError):
    """The outbox tables are missing, incomplete or of another version."""


class SubscriptionError(OutboxError):
    """A subscription is unknown, taken, or declared differently from what is stored."""


class FilterError(OutboxError, ValueError):
    """A filter, or an expression of tags, cannot be read. `text`: the filter; `at`: the place, counted from 0."""

    def __init__(self, problem: str, text: str = "", at: int | None = None) -> None:
        super().__init__(problem if at is None else f"{problem}\n{_pointed(text, at)}")
        self.text = text
        self.at = at


def _pointed(text: str, at: int) -> str:
    """Return the line of a text that holds a place, at most 72 characters of it, and below a caret under the place."""
    begin = max(text.rfind("\n", 0, at) + 1, at - 48)
    line, _, _ = text[begin : begin + 72].partition("\n")
    # A tab would move the caret, and no other control character is to reach a terminal.
    shown = "".join(letter if letter.isprintable() else " " for letter in line)
    return f"  {shown}\n  {' ' * (at - begin)}^"


class LeaseLostError(OutboxError):
    """The right to a partition has gone to another worker, or another server has answered; nothing was written."""


class PositionError(OutboxError):
    """A position was captured from, or stored for, another incarnation of the server."""


class PurgedError(OutboxError):
    """Retention has removed messages that a reader had not read yet."""


class OptionError(OutboxError, ValueError):
    """An option of the Spark source is unknown or outside its limits, or a front cannot listen at its place."""


class ArchiveError(OutboxError):
    """An archive of extracted messages cannot be read, or an extract cannot go on with it."""


class MissingExtraError(OutboxError, ImportError):
    """An optional dependency is needed; the text names the extra."""


class SenderError(OutboxError):
    """A destination cannot be found or opened."""


class SignatureError(OutboxError):
    """A webhook was not signed with the secret, or its signature is too old; do not trust the message."""


class HungHandlerError(OutboxError):
    """Handler calls passed their deadline and never returned; the process should be restarted."""


class MQClientError(OutboxError):
    """A call that RocketMQ's client or broker would refuse, in RocketMQ's words; `code`: the response code, if any."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text if code is None else f"CODE: {code}  DESC: {text}")
        self.code = code


class VerdictStandsError(OutboxError):
    """The opposite verdict on a transaction was stored before, and is final."""

    def __init__(self, transaction_id: str, verdict: str, asked: str, by: str | None = None) -> None:
        """`by`: the name of the decider before, as stored."""
        done = {"commit": "was committed", "rollback": "was rolled back"}[verdict]
        whom = "" if by is None else f" by {by}"
        super().__init__(
            f"transaction {transaction_id} {done} before{whom}, and that stands; this {asked} changes nothing"
        )
        self.transaction_id = transaction_id
        self.verdict = verdict
