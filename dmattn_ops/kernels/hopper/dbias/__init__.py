"""The gradient of a bias with queries that batches or heads share, on SM 9.0."""
