"""The profiler: from recorded work to tables, traces and pictures."""
