"""Load for a server and what it made of it: workloads, an asyncio client, reports. Knows HTTP and text, no engine."""
