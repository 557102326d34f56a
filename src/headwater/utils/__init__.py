"""What a training script needs beside the model: data, configuration, logs."""
