"""The front of the engine: HTTP, tracker, tokenizer and journal in one asyncio process without torch."""
