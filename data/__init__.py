"""Text -> token shards -> batches."""
