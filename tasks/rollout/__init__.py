"""The inference fleet of a run: topology, server states, gateway, health checks and recovery."""
