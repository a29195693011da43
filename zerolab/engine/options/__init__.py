"""What a user may ask of an engine: precision, replicas and offload, other meshes, models on `meta`."""
