"""A report for people: tables in the terminal, and a page with tables and plots."""
