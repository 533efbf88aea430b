"""Scheduling: which request runs when, and on which instance. Decisions are pure; shells are thin."""
