// The drills page: the fields follow the chosen job, and the confirmation says what will happen to which node.

const fields = document.getElementById("drill-fields");
const confirmation = document.getElementById("confirm");

document.addEventListener("change", (event) => {
  if (event.target.id === "drill-job") {
    htmx.trigger(fields, "live");
  }
});

document.addEventListener("click", async (event) => {
  if (!event.target.closest("#trigger")) return;
  const form = document.getElementById("drill-form");
  if (!form.reportValidity()) return;
  const wish = new URLSearchParams({ part: "preview" });
  for (const name of ["kind", "job", "rank", "steps_after_save", "recovered_within_s"]) {
    wish.set(name, form.elements[name].value);
  }
  await htmx.ajax("GET", `${form.dataset.preview}?${wish}`, { target: "#preview", swap: "innerHTML" });
  confirmation.showModal();
});
