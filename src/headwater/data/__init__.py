"""Input pipelines: text to HDF5, HDF5 to batches."""
