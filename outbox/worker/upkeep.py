"""How often a worker does tasks for which no message waits, in seconds; and how many keys stay in memory."""

#: Progress without messages for the subscription is stored so often: where rows were passed, and where none were.
#: It has to be stored, because purge keeps every row from the stored position on.
STORE_PASSED = 1.0
STORE_IDLE = 30.0
#: Progress that is the same as before is stored so often, to show that the subscription has a worker.
STORE_SAME = 3_600.0
#: A batch that takes longer is settled in parts, so often.
SETTLE_PARTS = 1.0
#: Old rows are deleted so often: progress, and expired rows of inbox and dedup.
PRUNE_PROGRESS = 600.0
PRUNE_EXPIRED = 600.0
#: The error of the waiting messages of a refused topic is brought up to date so often. A destination may alternate
#: between errors, and there may be thousands of messages.
RENEW_ERRORS = 60.0
#: Decisions of people are looked for so often while nothing is handed over.
DECISIONS = 1.0
#: While a subscription is paused, a lease is taken again so often for decisions that could not be carried out.
DECISIONS_AGAIN = 10.0
#: Messages past their retention are looked for so often.
PURGE = 60.0
#: After a portion when there is more to delete, so that messages are handled between the portions.
PRUNE_AGAIN = 0.1
#: At the end of a run that does not go on, at most so many portions are deleted; the next run deletes the rest.
LAST_PORTIONS = 100
#: The log gets a line about the messages that were sent so often.
LOG_ACTIVITY = 60.0
#: A backfill, which a command creates, is looked for so often, until it is there.
FIND_BACKFILL = 1.0
#: So many keys that are held back are kept in memory; if there are more, the database is asked.
MOST_KEYS = 100_000
