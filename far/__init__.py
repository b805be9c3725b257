"""Far context: does a model use what lies beyond its training length? See docs/far_context.md."""
