"""From a params file to a finished run."""
