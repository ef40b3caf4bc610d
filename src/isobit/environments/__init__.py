"""Environments: classes whose methods a model calls as tools, in processes of their own."""
