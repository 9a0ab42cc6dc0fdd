"""What a client decides, without any input or output: shared by the blocking and the asyncio
client."""
