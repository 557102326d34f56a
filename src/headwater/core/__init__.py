"""The small things everything else stands on: errors, units, seeds, stages."""
