"""What a run leaves behind and how it looks while it runs. Reads JSON Lines; imports nothing of specroll."""
