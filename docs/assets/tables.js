// A table that does not fit stands closer, and its code may be folded; on a phone it becomes a list: each row a paragraph,
// each number with the head of its column.
const narrow = matchMedia("screen and (max-width: 44.9375em)");

function fold() {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, i) => {
        cell.setAttribute("data-head", heads[i] || "");
        cell.toggleAttribute("data-none", cell.textContent.trim() === "–");
      });
    const room = table.closest(".md-content__inner, .md-typeset").clientWidth;
    const wide = () => table.scrollWidth > table.clientWidth + 1 || table.offsetWidth > room;
    for (const name of ["data-folded", "data-close"]) table.removeAttribute(name);
    table.toggleAttribute("data-close", !narrow.matches && wide());
    table.toggleAttribute("data-folded", narrow.matches && !table.closest(".stacked") && wide());
  }
}

document.addEventListener("DOMContentLoaded", fold);
addEventListener("load", fold);
narrow.addEventListener("change", fold);
