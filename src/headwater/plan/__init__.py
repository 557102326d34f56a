"""The dry run and the plan: decided before anything is allocated."""
