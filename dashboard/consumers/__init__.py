"""Sockets: agents on one route, browsers on another."""
