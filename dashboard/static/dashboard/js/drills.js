// The drills page: the fields follow the chosen kind and job, and the confirmation says what will happen to which node.

const fields = document.getElementById("drill-fields");
const confirmation = document.getElementById("confirm");

document.addEventListener("change", (event) => {
  if (event.target.id === "drill-job" || event.target.name === "kind") {
    htmx.trigger(fields, "live");
  }
});

document.addEventListener("click", async (event) => {
  if (!event.target.closest("#trigger")) return;
  const form = document.getElementById("drill-form");
  if (!form.reportValidity()) return;
  const wish = new URLSearchParams(new FormData(form));
  wish.delete("csrfmiddlewaretoken");
  wish.set("part", "preview");
  await htmx.ajax("GET", `${form.dataset.preview}?${wish}`, { target: "#preview", swap: "innerHTML" });
  confirmation.showModal();
});
