"""The Spark pipeline: messages as DataFrames, and the jobs that are worth having over them."""
