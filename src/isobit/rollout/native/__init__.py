"""The native engine: scheduler, pages, sampler, and what runs the model."""
