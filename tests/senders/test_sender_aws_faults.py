"""SQS and SNS in bad weather: the contract, and the order of a key."""

import pytest

from tests.support.aws_queues import FifoQueues
from tests.support.places import placed
from tests.support.remote import UNFIT_HEADERS, RemoteSenderContract

mortal = placed(FifoQueues, "aws")

UNFIT = (
    *UNFIT_HEADERS,
    ({"topic": "a b"}, "is no name of a "),
    ({"key": "\ud800"}, "'utf-8' codec can't encode"),
)


class TestSqs(RemoteSenderContract):
    """FIFO queues drop second copies, so each message is there once."""

    at = "fifo_queues"
    refuses = "SQS cannot carry it: "
    drops_copies = True
    big = 700_000
    unfit = UNFIT


@pytest.mark.full
class TestSns(RemoteSenderContract):
    """Standard topics: a message may be there twice. To SNS all is sent as to SQS, but for the form of a call."""

    at = "sns_topics"
    refuses = "SNS cannot carry it: "
    big = 150_000
    unfit = UNFIT
