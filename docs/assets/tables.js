// On a phone a table that does not fit becomes a list: each row a paragraph, each number with the head of its column.
const narrow = matchMedia("screen and (max-width: 44.9375em)");

function fold() {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    if (table.closest(".stacked")) continue;
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, i) => {
        cell.setAttribute("data-head", heads[i] || "");
        cell.toggleAttribute("data-none", cell.textContent.trim() === "–");
      });
    table.removeAttribute("data-folded");
    const room = table.closest(".md-content__inner, .md-typeset").clientWidth;
    table.toggleAttribute("data-folded", narrow.matches && (table.scrollWidth > table.clientWidth + 1 || table.offsetWidth > room));
  }
}

document.addEventListener("DOMContentLoaded", fold);
addEventListener("load", fold);
narrow.addEventListener("change", fold);
