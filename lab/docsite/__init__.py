"""What the documentation site has beside docs/*.md: pages, tables and plots made from the code and from committed results."""
