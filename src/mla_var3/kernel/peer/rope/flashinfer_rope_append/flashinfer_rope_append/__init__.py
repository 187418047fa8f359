"""FlashInfer's rotation and append."""
