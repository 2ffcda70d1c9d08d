"""The cycle as three programs of fixed shapes and addresses, which CUDA graphs replay: draft, verify, walk and keep."""
