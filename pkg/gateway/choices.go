package gateway

import (
	"errors"
	"net/http"

	"github.com/penstock/penstock/pkg/worker"
)

// countChoices returns how many sequences the request asks for, as an entry with its body would. It refuses a
// generation of more than the model takes for one call.
func (s *serving) countChoices() (choices int, err error) {
	operation, _ := Operation(s.r.URL.Path)
	model, fields := s.route.model, s.asked.scanned.choices
	if err := worker.CheckChoices(model.Name, model.ChoicesMax, operation, fields); err != nil {
		var unfit *worker.FieldError
		if errors.As(err, &unfit) {
			return 0, bad(http.StatusBadRequest, "invalid_choices", unfit.Field, "%s", unfit.Error())
		}
		return 0, err
	}
	return worker.Choices(operation, fields), nil
}
