"""Words that the reports and their pictures share, without Spark."""

#: What became of a half message; parked: given up, it waits for a person.
COMMITTED, ROLLED_BACK, OPEN, PARKED = STATES = ("committed", "rolled back", "open", "parked")

#: How long ago a message was set aside: below so many seconds.
AGE_LIMITS = ((60, "< 1 min"), (3_600, "< 1 h"), (86_400, "< 1 d"), (604_800, "< 7 d"))
OLDER = "7 d and more"
AGES = (*(name for _, name in AGE_LIMITS), OLDER)
