// Formulas: pymdownx.arithmatex has put \(...\) and \[...\] into elements of class "arithmatex".
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const text = element.textContent.trim();
    katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: true });
  }
});
