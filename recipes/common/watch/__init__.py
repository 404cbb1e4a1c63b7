"""No hang without a name: each rank's waits, and the report when a rank does not come."""
