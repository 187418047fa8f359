"""What people work with: sweeps, profiles, diagnoses, devlogs, knowledge, reports."""
