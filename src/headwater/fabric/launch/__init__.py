"""Launchers, which start processes as ranks: on this machine, on a Ray cluster, or for a script.

The rest of `headwater.fabric` is the code of the ranks themselves. It does not import this package.
"""
