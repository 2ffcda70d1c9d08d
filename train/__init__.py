"""Training a draft head: data, features, heads."""
