"""The rollout fleet of a run: its topology, the state of its servers, their gateway, recovery."""
