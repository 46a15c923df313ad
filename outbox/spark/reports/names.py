"""Words that the reports and their pictures share, without Spark."""

#: The states of a half message. Parked: its check-back was given up, and it waits for a person.
COMMITTED, ROLLED_BACK, OPEN, PARKED = STATES = ("committed", "rolled back", "open", "parked")

#: Groups of parked messages by age: each has an upper limit in seconds, and a name.
AGE_LIMITS = ((60, "< 1 min"), (3_600, "< 1 h"), (86_400, "< 1 d"), (604_800, "< 7 d"))
OLDER = "7 d and more"
AGES = (*(name for _, name in AGE_LIMITS), OLDER)
