package gateway

import (
	"fmt"
	"net/http"

	"github.com/penstock/penstock/pkg/worker"
)

// countChoices returns how many sequences the request asks for, as an entry with its body would. It refuses a
// generation of more than the model takes for one call.
func (s *serving) countChoices() (choices int, err error) {
	operation, _ := Operation(s.r.URL.Path)
	choices = 1
	for _, f := range s.asked.scanned.choices {
		if worker.Generates(operation) {
			model := s.route.model
			if err := worker.CheckChoices(model.Name, model.ChoicesMax, f.name, f.value); err != nil {
				return 0, bad(http.StatusBadRequest, "invalid_choices", f.name, "%s", err.Error())
			}
		}
		choices = max(choices, worker.Choices(fmt.Appendf(nil, `{"n":%s}`, f.value)))
	}
	return choices, nil
}
