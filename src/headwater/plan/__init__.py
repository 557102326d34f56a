"""The dry run of a step and the plan of a run, made before anything is allocated."""
