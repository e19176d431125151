package watch

// SQLLook is the statement of a look, for tests of its plan.
const SQLLook = sqlLook
