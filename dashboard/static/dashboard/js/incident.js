// The incident page: fills the confirmation of an action with what the pressed button would do.

document.addEventListener("click", (event) => {
  const button = event.target.closest('[data-dialog="act"]');
  if (!button) return;
  const dialog = document.getElementById("act");
  dialog.querySelector("#act-title").textContent = `${button.dataset.word}?`;
  dialog.querySelector("[data-consequence-text]").textContent = button.dataset.consequence;
  dialog.querySelector("[data-word-text]").textContent = button.dataset.word;
  dialog.querySelector('input[name="kind"]').value = button.dataset.kind;
});
