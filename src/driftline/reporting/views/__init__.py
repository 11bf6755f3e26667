"""Views: what a result shows, as sentences, facts and tables, whatever the output format."""
