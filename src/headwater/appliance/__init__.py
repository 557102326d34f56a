"""The appliance: a queue of jobs, and what gives them the CSXs of a machine or a cluster.

A job is a command line with a number of CSXs; nothing here knows of models.
"""
