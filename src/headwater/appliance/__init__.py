"""The appliance: a queue of jobs and the allocation of CSXs of a machine or a cluster to them.

A job is a command line with a number of CSXs. This package does not depend on models or training.
"""
