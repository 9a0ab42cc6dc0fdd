"""The nodes that a client calls: which ones, when, and how to connect. What is shared by the
blocking and the asyncio client; input and output are theirs."""
