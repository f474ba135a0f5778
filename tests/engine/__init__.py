"""The step: arena, order of addition, any module, the cord."""
